"""What a run comes to, from the files in its folder: findings, figures and pages of them."""
