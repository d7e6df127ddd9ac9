from pdbus.decode.service import DecodeService
from pdbus.decode.settings import DecodeSettings
from pdbus.runtime import run

if __name__ == "__main__":
    raise SystemExit(run(DecodeService, DecodeSettings))
