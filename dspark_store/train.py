"""``python -m dspark_store.train``: the same as ``dspark-store train``."""

from dspark_store.cli.main import leave, main_of

main = main_of("train")

if __name__ == "__main__":
    leave(main(None))
