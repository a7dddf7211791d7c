"""Tests of hooks.upstream_fixes."""
