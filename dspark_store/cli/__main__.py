"""``python -m dspark_store.cli``: the same as ``dspark-store``."""

from dspark_store.cli.main import enter

if __name__ == "__main__":
    enter()
