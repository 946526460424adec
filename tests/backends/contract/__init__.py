"""What each kind that starts instances must do, whatever happens on the way: `suite.CloudContract`."""
