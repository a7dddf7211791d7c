"""The artifact cache: what a package's content depends on, and the packages by that key."""
