"""Addresses and their tables, host allocation and registration, slots."""
