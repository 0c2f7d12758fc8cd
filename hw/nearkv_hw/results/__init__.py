"""What happens to partial results: merge over units, finish, write-back."""
