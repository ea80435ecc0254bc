def main() -> int:
    return 2
