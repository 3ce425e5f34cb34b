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
    let (builder, mut client) = settings(url, options, environment)?;
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

/// Options over environment.
fn settings(
    url: &Url,
    options: &StorageOptions,
    environment: &Environment,
) -> Result<(GoogleCloudStorageBuilder, Client)> {
    let (mut inherited, mut given, mut client) = (Vec::new(), Vec::new(), Client::default());
    if let Some(file) = environment.get("SERVICE_ACCOUNT").filter(|file| !file.is_empty()) {
        inherited.push((GoogleConfigKey::ServiceAccount, file.clone()));
    }
    let ours =
        |(name, value): &(&String, &String)| name.starts_with("GOOGLE_") && !value.is_empty();
    for (name, value) in environment.iter().filter(ours) {
        match GoogleConfigKey::from_str(&name.to_ascii_lowercase()) {
            Ok(GoogleConfigKey::Client(key)) => {
                client.take(name, key.as_ref(), value)?;
            }
            Ok(key) => inherited.push((key, checked(name, key, value)?)),
            Err(_) => {}
        }
    }
    for (name, value) in options {
        let lower = name.to_ascii_lowercase();
        let key = match lower.as_str() {
            // As gcsfs has it: a file, or no credentials at all.
            "token" if value == "anon" => {
                given.push((GoogleConfigKey::SkipSignature, "true".into()));
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
        given.push((key, checked(name, key, value)?));
    }
    let start = GoogleCloudStorageBuilder::new().with_url(url.to_string());
    let all = option::of_one_source(inherited, given, is_credential, None);
    Ok((all.fold(start, |b, (key, value)| b.with_config(key, value)), client))
}

/// Whether a setting is a credential.
fn is_credential(key: &GoogleConfigKey) -> bool {
    use GoogleConfigKey as K;
    matches!(
        key,
        K::ServiceAccount
            | K::ServiceAccountKey
            | K::ApplicationCredentials
            | K::BearerToken
            | K::SkipSignature
    )
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

#[cfg(test)]
mod tests {
    use super::option::map;
    use super::*;

    #[test]
    fn credentials_are_of_one_source() {
        let environment = map(&[
            ("GOOGLE_SERVICE_ACCOUNT", "/env.json"),
            ("GOOGLE_BASE_URL", "http://127.0.0.1:1"),
        ]);
        let url = Url::parse("gs://bucket/x").unwrap();
        let who = |options: &[(&str, &str)]| {
            let (builder, _) = settings(&url, &map(options), &environment).unwrap();
            let value = |key| builder.get_config_value(&key);
            assert_eq!(value(GoogleConfigKey::BaseUrl).unwrap(), "http://127.0.0.1:1");
            (value(GoogleConfigKey::ServiceAccount), value(GoogleConfigKey::ServiceAccountKey))
        };
        assert_eq!(who(&[]), (Some("/env.json".into()), None));
        assert_eq!(who(&[("anon", "false")]), (Some("/env.json".into()), None));
        assert_eq!(who(&[("token", "/own.json")]), (Some("/own.json".into()), None));
        assert_eq!(who(&[("service_account_key", "{}")]), (None, Some("{}".into())));
        assert_eq!(who(&[("token", "anon")]), (None, None));
    }
}
