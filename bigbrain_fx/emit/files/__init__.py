"""Plan -> the files of a bundle: device files, entry points, README. Knows no single op."""
