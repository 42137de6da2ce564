"""Training: dependency-aware fine-tuning (DepCache, doi 10.1145/3769778, section 3.3). Nothing in ragjax imports it."""
