"""The policies that come with the scheduler, one a file."""
