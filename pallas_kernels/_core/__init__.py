"""What every op shares: errors, dispatch, validation, the platform, and the test rig."""
