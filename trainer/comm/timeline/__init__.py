"""What each bucket's all-reduce cost, and which ranks it waited for."""
