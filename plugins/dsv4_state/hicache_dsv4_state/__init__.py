"""Compress-state rings of DeepSeek-V4, one row per page."""
