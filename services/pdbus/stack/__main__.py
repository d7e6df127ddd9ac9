from pdbus.stack.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
