"""Print the list of methods: `python -m kvjax.policies`."""

from kvjax.policies.registry import method_list

if __name__ == "__main__":
    print(method_list())
