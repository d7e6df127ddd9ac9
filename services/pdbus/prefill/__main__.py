from pdbus.prefill.service import PrefillService
from pdbus.prefill.settings import PrefillSettings
from pdbus.runtime import run

if __name__ == "__main__":
    raise SystemExit(run(PrefillService, PrefillSettings))
