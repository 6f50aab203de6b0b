"""``python -m dspark_store.evaluate``: the same as ``dspark-store evaluate``."""

from dspark_store.cli.main import leave, main_of

main = main_of("evaluate")

if __name__ == "__main__":
    leave(main(None))
