"""What quantised attention does to the end of a task: pictures, a language model, sentences."""
