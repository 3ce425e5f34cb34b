"""Makes the bucket and container that the tests of the store use.

Arguments: `s3=<endpoint>` or `azure=<endpoint with account>`, any number of them.
"""

import base64
import datetime
import hashlib
import hmac
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

BUCKET = "s4test"
# The account and key that every Azure emulator knows; no secret.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def s3(endpoint: str) -> urllib.request.Request:
    # The emulators check no signature, but want to see one to know the service.
    credential = "test/20260101/us-east-1/s3/aws4_request"
    authorization = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders=host, Signature=0"
    headers = {"Authorization": authorization}
    return urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT", headers=headers)


def azure(endpoint: str) -> urllib.request.Request:
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    version = "2021-08-06"
    path = urllib.parse.urlparse(endpoint).path
    resource = f"/{ACCOUNT}{path}/{BUCKET}\nrestype:container"
    to_sign = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    digest = hmac.new(base64.b64decode(KEY), to_sign.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
    }
    url = f"{endpoint}/{BUCKET}?restype=container"
    return urllib.request.Request(url, method="PUT", headers=headers)


def make(kind: str, endpoint: str) -> str:
    """Makes one; returns what is wrong, or nothing. A server may listen before it can answer."""
    wrong = ""
    for _ in range(20):
        request = {"s3": s3, "azure": azure}[kind](endpoint)
        try:
            urllib.request.urlopen(request, timeout=30).close()
            return ""
        except urllib.error.HTTPError as error:
            wrong = f"{error}: {error.read()[:500]!r}"
            if error.code < 500:
                break
        except OSError as error:
            wrong = str(error)
        time.sleep(0.5)
    return wrong


for argument in sys.argv[1:]:
    kind, _, endpoint = argument.partition("=")
    if wrong := make(kind, endpoint):
        sys.exit(f"{argument}: {wrong}")
