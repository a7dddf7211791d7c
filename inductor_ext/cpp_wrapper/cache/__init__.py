"""The artifact cache: computes cache keys of packages and stores packages by key."""
