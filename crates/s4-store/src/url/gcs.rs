//! Google Cloud Storage.

use std::str::FromStr;
use std::sync::Arc;

use object_store::ObjectStore;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use url::Url;

use super::client::{self, Client};
use super::{Environment, StorageOptions, option};
use crate::error::Result;

const KIND: &str = "Google Cloud Storage";

/// Names of the options, besides those of the client, to suggest one for a typo.
pub(super) const NAMES: [&str; 12] = [
    "anon",
    "application_credentials",
    "base_url",
    "bearer_token",
    "bucket",
    "endpoint",
    "endpoint_url",
    "project",
    "service_account",
    "service_account_key",
    "skip_signature",
    "token",
];

pub(super) fn open(
    url: &Url,
    options: &StorageOptions,
    environment: &Environment,
) -> Result<(Arc<dyn ObjectStore>, String)> {
    let mut client = Client::default();
    let mut builder = GoogleCloudStorageBuilder::from_env().with_url(url.to_string());
    let ours =
        |(name, value): &(&String, &String)| name.starts_with("GOOGLE_") && !value.is_empty();
    for (name, value) in environment.iter().filter(ours) {
        match GoogleConfigKey::from_str(&name.to_ascii_lowercase()) {
            Ok(GoogleConfigKey::Client(key)) => {
                client.take(name, key.as_ref(), value)?;
            }
            Ok(key) => {
                checked(name, key, value)?;
            }
            Err(_) => {}
        }
    }
    for (name, value) in options {
        let lower = name.to_ascii_lowercase();
        let key = match lower.as_str() {
            // As gcsfs has it: a file, or no credentials at all.
            "token" if value == "anon" => {
                builder = builder.with_config(GoogleConfigKey::SkipSignature, "true");
                continue;
            }
            "token" => GoogleConfigKey::ServiceAccount,
            "anon" => GoogleConfigKey::SkipSignature,
            "endpoint" | "endpoint_url" => GoogleConfigKey::BaseUrl,
            // The project is needed to make buckets, which a store never does.
            "project" => continue,
            other
                if client.take(name, other.strip_prefix("google_").unwrap_or(other), value)? =>
            {
                continue;
            }
            other => GoogleConfigKey::from_str(other)
                .map_err(|_| option::unknown(KIND, name, &[&NAMES[..], &client::NAMES].concat()))?,
        };
        builder = builder.with_config(key, checked(name, key, value)?);
    }
    let base = builder.get_config_value(&GoogleConfigKey::BaseUrl);
    let base = base.unwrap_or_else(|| "googleapis.com".into());
    if base.starts_with("http://") {
        client.allow_http();
    }
    let (client, connector) = client.finish();
    let builder = builder
        .with_retry(client::retry_config())
        .with_client_options(client)
        .with_http_connector(connector);
    let store = builder.build().map_err(|e| super::refused(KIND, &e))?;
    Ok((Arc::new(store), format!("{KIND} {base} {}", url.host_str().unwrap_or_default())))
}

/// Whether an option is known, whatever its value.
pub(super) fn knows(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    NAMES.contains(&lower.as_str()) || GoogleConfigKey::from_str(&lower).is_ok()
}

/// The value, if the builder will understand it.
fn checked(name: &str, key: GoogleConfigKey, value: &str) -> Result<String> {
    Ok(match key {
        GoogleConfigKey::SkipSignature => option::boolean(name, value)?.to_string(),
        GoogleConfigKey::BaseUrl => option::address(name, value)?,
        _ => value.to_owned(),
    })
}
