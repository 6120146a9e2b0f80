"""Methods in one file each that change nothing else. They show that the framework suffices, and are templates."""
