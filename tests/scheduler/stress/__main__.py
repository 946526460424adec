from __future__ import annotations

import sys

import django

if __name__ == "__main__":
    django.setup()
    from tests.scheduler.stress.stress import main  # its models need the set-up

    main(float(sys.argv[1]), int(sys.argv[2]))
