from pdbus.invalidator.service import InvalidatorService
from pdbus.invalidator.settings import InvalidatorSettings
from pdbus.runtime import run

if __name__ == "__main__":
    raise SystemExit(run(InvalidatorService, InvalidatorSettings))
