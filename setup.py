"""Build script of inductor_ext; all metadata lives in pyproject.toml."""

from setuptools import setup

setup()
