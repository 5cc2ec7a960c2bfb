"""Builders that tests of several folders share."""
