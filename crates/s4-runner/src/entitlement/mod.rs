//! Decides whether this machine may run the service, before a GPU is touched and before anything listens.
//!
//! Three modes. `off`, for open use, allows everything. `register-usage` calls AWS Marketplace's
//! RegisterUsage once, and needs a reply that a pinned key signed; AWS describes that call for containers.
//! `instance-identity` needs the signed identity document of an EC2 instance that was launched from the
//! product's image. Anything but a clear yes is a no. This is an extension point for licences, not a security
//! boundary: whoever controls the machine can change the program.

mod ber;
mod identity;
mod jwt;
mod register;

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use tokio::time::{Instant, sleep, timeout};

use crate::error::{Error, Result};
use crate::imds::{Imds, NoAnswer};

/// The most tries.
const TRIES: u32 = 3;
/// The largest allowed `try_seconds` and `total_seconds`.
const LONGEST: u64 = 24 * 3600;
/// The pause after the first try.
const PAUSE: Duration = Duration::from_millis(500);

/// How the service finds out whether it is entitled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Everybody may run it.
    #[default]
    Off,
    /// AWS Marketplace's RegisterUsage.
    RegisterUsage,
    /// The instance's identity document.
    InstanceIdentity,
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        match text {
            "off" => Ok(Self::Off),
            "register-usage" => Ok(Self::RegisterUsage),
            "instance-identity" => Ok(Self::InstanceIdentity),
            _ => Err("expected `off`, `register-usage` or `instance-identity`".to_owned()),
        }
    }
}

/// Settings of the entitlement.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// The mode.
    pub mode: Mode,
    /// The product's code.
    pub product_code: String,
    /// Version of the key that signs replies.
    pub public_key_version: u32,
    /// That key, a PEM file.
    pub public_key: Option<PathBuf>,
    /// The algorithm of signatures: RS256, RS384, RS512, PS256, PS384, PS512, ES256 or ES384. AWS
    /// does not name one; any other is refused.
    pub algorithm: String,
    /// The certificate that identity documents of the region are signed with, a PEM file.
    pub certificate: Option<PathBuf>,
    /// The region; `None`: the instance's.
    pub region: Option<String>,
    /// Address of the metering service; `None`: AWS's in that region.
    pub endpoint: Option<String>,
    /// Seconds that one try may take.
    pub try_seconds: u64,
    /// Seconds that all tries together may take.
    pub total_seconds: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mode: Mode::Off,
            product_code: String::new(),
            public_key_version: 1,
            public_key: None,
            algorithm: "PS256".into(),
            certificate: None,
            region: None,
            endpoint: None,
            try_seconds: 5,
            total_seconds: 60,
        }
    }
}

/// The outcome of a try that was not a yes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum No {
    /// Refused permanently.
    Final { code: &'static str, why: String },
    /// It may be tried again.
    Again(String),
}

impl No {
    fn new(code: &'static str, why: impl Into<String>) -> Self {
        Self::Final { code, why: why.into() }
    }
}

impl From<NoAnswer> for No {
    fn from(e: NoAnswer) -> Self {
        match e {
            NoAnswer::Absent(_) => Self::new("no_identity", e.to_string()),
            // Throttled, or with a token that has just expired.
            NoAnswer::Refused { status: 401 | 429, .. } => Self::Again(e.to_string()),
            NoAnswer::Refused { status, .. } if status < 500 => {
                Self::new("no_identity", e.to_string())
            }
            _ => Self::Again(e.to_string()),
        }
    }
}

impl Settings {
    /// Checks that everything that the mode needs is there.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn check(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(format!("`entitlement`: {what}")));
        if self.mode == Mode::Off {
            return Ok(());
        }
        let fits = |c: char| c.is_ascii_alphanumeric() || "-/=:_.@".contains(c);
        let code = &self.product_code;
        if code.is_empty() || code.len() > 255 || !code.chars().all(fits) {
            return bad("`product_code` is missing or invalid");
        }
        if self.try_seconds == 0 || self.total_seconds == 0 {
            return bad("`try_seconds` and `total_seconds` must be at least 1");
        }
        if self.try_seconds.max(self.total_seconds) > LONGEST {
            return bad("`try_seconds` and `total_seconds` must be at most a day");
        }
        if self.region.as_deref().is_some_and(|region| !register::is_region(region)) {
            return bad("`region`: expected the name of a region, such as eu-central-1");
        }
        if let Some(endpoint) = &self.endpoint {
            check_address("entitlement.endpoint", endpoint)?;
        }
        match self.mode {
            Mode::Off => Ok(()),
            Mode::RegisterUsage => {
                if self.public_key_version == 0 {
                    return bad("`public_key_version` must be at least 1");
                }
                jwt::Key::read(self).map(drop)
            }
            Mode::InstanceIdentity => identity::Certificate::read(self).map(drop),
        }
    }
}

/// Checks that a member is the address of an HTTP service.
pub(crate) fn check_address(member: &str, address: &str) -> Result<()> {
    let url = reqwest::Url::parse(address).ok();
    if url.is_some_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host()) {
        return Ok(());
    }
    let what = "expected an address that begins with http:// or https://";
    Err(Error::Config(format!("`{member}`: {what}")))
}

/// Finds out whether the service may run; `Ok` if so.
///
/// # Errors
/// [`Error::Denied`] if it was refused permanently; [`Error::Unreachable`] if a few tries within the time gave no
/// clear answer; [`Error::Config`].
pub async fn decide(settings: &Settings, imds: &Imds) -> Result<()> {
    match settings.mode {
        Mode::Off => Ok(()),
        Mode::RegisterUsage => {
            let key = jwt::Key::read(settings)?;
            repeat(settings, async || register::ask(settings, &key, imds).await).await
        }
        Mode::InstanceIdentity => {
            let certificate = identity::Certificate::read(settings)?;
            repeat(settings, async || identity::ask(settings, &certificate, imds).await).await
        }
    }
}

/// Tries a few times, while there is time.
async fn repeat(
    settings: &Settings,
    mut ask: impl AsyncFnMut() -> std::result::Result<(), No>,
) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(settings.total_seconds);
    let one = Duration::from_secs(settings.try_seconds);
    let mut last = String::new();
    for number in 0..TRIES {
        let limit = one.min(end.saturating_duration_since(Instant::now()));
        match timeout(limit, ask()).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(No::Final { code, why })) => return Err(Error::Denied { code, why }),
            Ok(Err(No::Again(why))) => last = why,
            Err(_) => last = format!("no answer within {limit:?}"),
        }
        let pause = PAUSE * 2u32.pow(number);
        if number + 1 == TRIES || Instant::now() + pause >= end {
            break;
        }
        tracing::warn!(why = last, "the entitlement request failed: retrying");
        sleep(pause).await;
    }
    Err(Error::Unreachable(last))
}
