"""Methods in one file each that change nothing else. They prove that the framework holds, and are templates to start
from."""
