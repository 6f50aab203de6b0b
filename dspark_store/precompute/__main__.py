"""``python -m dspark_store.precompute``: the same as ``dspark-store precompute``."""

from dspark_store.cli.main import leave, main_of

main = main_of("precompute")

if __name__ == "__main__":
    leave(main(None))
