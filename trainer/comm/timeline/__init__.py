"""What each bucket's all-reduce cost, and whom it waited for."""
