"""Small real models to compile: each file keeps the contract of a model file and stands alone."""
