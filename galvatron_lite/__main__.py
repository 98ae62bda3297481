"""``python -m galvatron_lite`` is ``galvatron``."""

from galvatron_lite.cli import main

main()
