"""Answers out: the files with which a training framework runs what was found, one module for each framework."""
