"""Methods of one file each that change nothing else: the proof that the frame holds, and skeletons to begin with."""
