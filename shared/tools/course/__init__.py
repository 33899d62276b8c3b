"""The course on the command line: a learner's folder, grading, the own engine, and labs with planted bugs."""
