"""`python -m tunix_lite.launch`: the same as `tunix-lite launch`. Its code is
distributed/launcher.py."""

from tunix_lite.distributed.launcher import main

if __name__ == "__main__":
    main()
