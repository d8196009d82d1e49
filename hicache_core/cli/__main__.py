"""``python -m hicache_core.cli`` is the command, for installs that have no script."""

from hicache_core.cli import main

main()
