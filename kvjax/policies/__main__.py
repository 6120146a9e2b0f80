"""Print the list of methods: `python -m kvjax.policies`."""

from kvjax.policies.registry import listed

if __name__ == "__main__":
    print(listed())
