"""Prefix index, policies, and the cache that joins them with a controller."""
