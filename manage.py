#!/usr/bin/env python3
"""The server's command line: `up`, `migrate`, `qcluster`, `ticker`, …; `manage.py help --commands` lists all."""

from __future__ import annotations

from dstackweb.manage import main

if __name__ == "__main__":
    main()
