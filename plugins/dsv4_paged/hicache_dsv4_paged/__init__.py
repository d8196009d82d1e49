"""Paged rows of DeepSeek-V4: compressed pages (C4, C128, any ratio) and the anchor that names them."""
