"""`python -m kvjax.policies`: the methods, a line each."""

from kvjax.policies.registry import listed

if __name__ == "__main__":
    print(listed())
