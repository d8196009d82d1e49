"""Index pages of DSA: keys and their scales, one row per page."""
