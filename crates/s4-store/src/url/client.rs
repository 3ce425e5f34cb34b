//! Options of the HTTP client, the same for every kind of object store.

use std::io::Read;
use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use object_store::{BackoffConfig, Certificate, ClientConfigKey, ClientOptions, RetryConfig};

use super::option;
use super::stall::{STALL, StallConnector};
use crate::error::{Error, Result};

/// Time to find the server and to shake hands.
const CONNECT: Duration = Duration::from_secs(10);
/// Most bytes of a file of certificates: more than any real one has.
const MAX_BUNDLE: u64 = 16 << 20;

/// Names of the options.
pub(super) const NAMES: [&str; 23] = [
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "default_content_type",
    "disable_system_certificates",
    "http1_only",
    "http2_keep_alive_interval",
    "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle",
    "http2_max_frame_size",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "read_timeout",
    "timeout",
    "user_agent",
    "use_ssl",
    "verify",
    "ca_bundle",
];

/// The settings of the client, as options make them.
pub(super) struct Client {
    options: ClientOptions,
    stall: Duration,
    headers: HeaderMap,
    /// The certificates to trust instead of the system's.
    roots: Option<Vec<Certificate>>,
    allow_http: Option<bool>,
}

impl Default for Client {
    fn default() -> Self {
        let options = ClientOptions::new().with_timeout_disabled().with_connect_timeout(CONNECT);
        Self { options, stall: STALL, headers: HeaderMap::new(), roots: None, allow_http: None }
    }
}

impl Client {
    /// Takes an option, if it is one of the client's. `key` is its name in lower case without a
    /// provider's prefix, `name` the name as it was given.
    pub(super) fn take(&mut self, name: &str, key: &str, value: &str) -> Result<bool> {
        match key {
            "verify" => self.verify(name, value)?,
            "ca_bundle" => self.trust_only(name, value)?,
            "use_ssl" => self.allow_http = Some(!option::boolean(name, value)?),
            "allow_http" => self.allow_http = Some(option::boolean(name, value)?),
            "read_timeout" => self.stall = option::duration(name, value)?,
            _ => match key.parse::<ClientConfigKey>() {
                Ok(key) => self.set(key, checked(name, key, value)?),
                Err(_) => return Ok(false),
            },
        }
        Ok(true)
    }

    fn set(&mut self, key: ClientConfigKey, value: String) {
        self.options = std::mem::take(&mut self.options).with_config(key, value);
    }

    /// As in Amazon's tools: whether certificates are checked, or the file of those to trust.
    fn verify(&mut self, name: &str, value: &str) -> Result<()> {
        let Some(check) = option::truth(value) else { return self.trust_only(name, value) };
        self.options = std::mem::take(&mut self.options).with_allow_invalid_certificates(!check);
        Ok(())
    }

    /// Trusts the certificates in a file, and no others.
    fn trust_only(&mut self, name: &str, path: &str) -> Result<()> {
        let wrong = |what: String| {
            Error::Argument(format!(
                "storage option `{name}`: expected `true`, `false` or a PEM file of CA certificates; {path}: {what}"
            ))
        };
        let mut pem = Vec::new();
        let file = std::fs::File::open(path).map_err(|e| wrong(e.to_string()))?;
        file.take(MAX_BUNDLE + 1).read_to_end(&mut pem).map_err(|e| wrong(e.to_string()))?;
        if pem.len() as u64 > MAX_BUNDLE {
            return Err(wrong("too large".into()));
        }
        let found = Certificate::from_pem_bundle(&pem).ok().filter(|found| !found.is_empty());
        let found = found.ok_or_else(|| wrong("it contains no certificate".into()))?;
        self.options = std::mem::take(&mut self.options).with_allow_invalid_certificates(false);
        self.roots = Some(found);
        Ok(())
    }

    /// Adds a header to every request.
    pub(super) fn header(&mut self, header: &'static str, value: HeaderValue) {
        self.headers.insert(header, value);
    }

    /// Whether connections without TLS are allowed, if an option says so or not.
    pub(super) fn plain(&self) -> Option<bool> {
        self.allow_http
    }

    /// Allows connections without TLS, unless an option says otherwise.
    pub(super) fn allow_http(&mut self) {
        self.allow_http.get_or_insert(true);
    }

    /// The options, and the connector that makes clients from them.
    pub(super) fn finish(self) -> (ClientOptions, StallConnector) {
        let options = self.options.with_allow_http(self.allow_http.unwrap_or(false));
        let options = match self.headers.is_empty() {
            true => options,
            false => options.with_default_headers(self.headers),
        };
        let options = match self.roots {
            Some(roots) => roots
                .into_iter()
                .fold(options, ClientOptions::with_root_certificate)
                .with_no_system_certificates(true),
            None => options,
        };
        (options, StallConnector(self.stall))
    }
}

/// The value, if the client will understand it.
fn checked(name: &str, key: ClientConfigKey, value: &str) -> Result<String> {
    use ClientConfigKey as K;
    Ok(match key {
        K::AllowInvalidCertificates
        | K::NoSystemCertificates
        | K::Http1Only
        | K::Http2Only
        | K::Http2KeepAliveWhileIdle
        | K::RandomizeAddresses => option::boolean(name, value)?.to_string(),
        K::ConnectTimeout
        | K::Timeout
        | K::PoolIdleTimeout
        | K::Http2KeepAliveInterval
        | K::Http2KeepAliveTimeout => format!("{}ms", option::duration(name, value)?.as_millis()),
        K::PoolMaxIdlePerHost => option::count(name, value, 0..=1 << 16)?.to_string(),
        K::Http2MaxFrameSize => option::count(name, value, 1 << 14..=(1 << 24) - 1)?.to_string(),
        K::UserAgent => {
            HeaderValue::from_str(value).map_err(|_| option::bad(name, "plain text"))?;
            value.to_owned()
        }
        _ => value.to_owned(),
    })
}

/// Quick retries only: callers repeat a request until its deadline, and read back where a blind repeat
/// is unsafe. Slow retries would also hide the cause of a failure from a short deadline.
pub(super) fn retry_config() -> RetryConfig {
    let init_backoff = Duration::from_millis(20);
    RetryConfig {
        backoff: BackoffConfig { init_backoff, ..BackoffConfig::default() },
        max_retries: 2,
        retry_timeout: Duration::from_secs(20),
    }
}
