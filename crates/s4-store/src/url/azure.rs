//! Azure Blob Storage.

use std::str::FromStr;
use std::sync::Arc;

use object_store::ObjectStore;
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use url::Url;

use super::client::{self, Client};
use super::{Environment, StorageOptions, option};
use crate::error::{Error, Result};

const KIND: &str = "Azure";

/// Names of the options, besides those of the client, to suggest one for a typo.
pub(super) const NAMES: [&str; 23] = [
    "access_key",
    "account_key",
    "account_name",
    "anon",
    "authority_host",
    "bearer_token",
    "client_id",
    "client_secret",
    "connection_string",
    "container_name",
    "credential",
    "disable_tagging",
    "endpoint",
    "endpoint_url",
    "federated_token_file",
    "msi_endpoint",
    "sas_key",
    "sas_token",
    "skip_signature",
    "tenant_id",
    "token",
    "use_azure_cli",
    "use_emulator",
];

pub(super) fn open(
    url: &Url,
    options: &StorageOptions,
    environment: &Environment,
) -> Result<(Arc<dyn ObjectStore>, String)> {
    let (builder, mut client) = settings(url, options, environment)?;
    let account = builder.get_config_value(&AzureConfigKey::AccountName).unwrap_or_default();
    let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint).unwrap_or_default();
    if endpoint.starts_with("http://") {
        client.allow_http();
    }
    let (client, connector) = client.finish();
    let builder = builder
        .with_retry(client::retry_config())
        .with_client_options(client)
        .with_http_connector(connector);
    let store = builder.build().map_err(|e| super::refused(KIND, &e))?;
    let container = url.host_str().unwrap_or_default();
    Ok((Arc::new(store), format!("{KIND} {account} {endpoint} {container}")))
}

/// Options over environment.
fn settings(
    url: &Url,
    options: &StorageOptions,
    environment: &Environment,
) -> Result<(MicrosoftAzureBuilder, Client)> {
    let (mut inherited, mut given, mut client) = (Vec::new(), Vec::new(), Client::default());
    for (name, value) in environment.iter().filter(|(_, value)| !value.is_empty()) {
        match name.as_str() {
            "IDENTITY_ENDPOINT" => inherited.push((AzureConfigKey::MsiEndpoint, value.clone())),
            _ if !name.starts_with("AZURE_") => {}
            _ => match AzureConfigKey::from_str(&name.to_ascii_lowercase()) {
                Ok(AzureConfigKey::Client(key)) => {
                    client.take(name, key.as_ref(), value)?;
                }
                Ok(key) => inherited.push((key, checked(name, key, value.clone())?)),
                Err(_) => {}
            },
        }
    }
    let whole = environment.get("AZURE_STORAGE_CONNECTION_STRING");
    if let Some(text) = whole.filter(|text| !text.is_empty()) {
        inherited.extend(connection_string(text)?);
    }
    for (name, value) in options {
        let lower = name.to_ascii_lowercase();
        let key = match lower.as_str() {
            "connection_string" => {
                given.extend(connection_string(value)?);
                continue;
            }
            "credential" => AzureConfigKey::AccessKey,
            "anon" => AzureConfigKey::SkipSignature,
            "endpoint_url" => AzureConfigKey::Endpoint,
            other if client.take(name, other.strip_prefix("azure_").unwrap_or(other), value)? => {
                continue;
            }
            other => AzureConfigKey::from_str(other)
                .map_err(|_| option::unknown(KIND, name, &[&NAMES[..], &client::NAMES].concat()))?,
        };
        given.push((key, checked(name, key, value.clone())?));
    }
    let kind = AzureConfigKey::CredentialType;
    let start = MicrosoftAzureBuilder::new().with_url(url.to_string());
    let all = option::of_one_source(inherited, given, is_credential, Some(kind));
    Ok((all.fold(start, |b, (key, value)| b.with_config(key, value)), client))
}

/// Whether a setting is a credential. The names of account and identity are not.
fn is_credential(key: &AzureConfigKey) -> bool {
    use AzureConfigKey as K;
    matches!(
        key,
        K::AccessKey
            | K::SasKey
            | K::Token
            | K::ClientSecret
            | K::FederatedTokenFile
            | K::UseAzureCli
            | K::SkipSignature
    )
}

/// Whether an option is known, whatever its value.
pub(super) fn knows(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    NAMES.contains(&lower.as_str()) || AzureConfigKey::from_str(&lower).is_ok()
}

/// The value, if the builder will understand it.
fn checked(name: &str, key: AzureConfigKey, value: String) -> Result<String> {
    use AzureConfigKey as K;
    Ok(match key {
        K::SkipSignature
        | K::UseEmulator
        | K::UseAzureCli
        | K::UseFabricEndpoint
        | K::DisableTagging => option::boolean(name, &value)?.to_string(),
        K::Endpoint | K::MsiEndpoint | K::AuthorityHost => option::address(name, &value)?,
        _ => value,
    })
}

/// The account, its address and the credentials in a connection string.
fn connection_string(text: &str) -> Result<Vec<(AzureConfigKey, String)>> {
    let mut keys = Vec::new();
    for part in text.split(';').filter(|part| !part.trim().is_empty()) {
        // Values may hold `=`: keys are base64.
        let Some((name, value)) = part.split_once('=') else {
            return Err(Error::Argument(
                "the Azure connection string has a part without `=`".into(),
            ));
        };
        let key = match name.trim() {
            "AccountName" => AzureConfigKey::AccountName,
            "AccountKey" => AzureConfigKey::AccessKey,
            "SharedAccessSignature" => AzureConfigKey::SasKey,
            "BlobEndpoint" => AzureConfigKey::Endpoint,
            _ => continue,
        };
        keys.push((key, checked("connection_string", key, value.to_owned())?));
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::option::map;
    use super::*;

    #[test]
    fn a_connection_string_is_taken_apart() {
        let text = "DefaultEndpointsProtocol=http;AccountName=acc;AccountKey=YWI=;\
                    BlobEndpoint=http://127.0.0.1:1/acc;";
        let keys = connection_string(text).unwrap();
        let expected = [
            (AzureConfigKey::AccountName, "acc".to_owned()),
            (AzureConfigKey::AccessKey, "YWI=".to_owned()),
            (AzureConfigKey::Endpoint, "http://127.0.0.1:1/acc".to_owned()),
        ];
        assert_eq!(keys, expected);
        assert!(connection_string("nonsense").is_err());
        let options = [("connection_string".to_owned(), text.to_owned())].into();
        let url = Url::parse("az://box/x").unwrap();
        let (_, server) = open(&url, &options, &Environment::new()).unwrap();
        assert_eq!(server, "Azure acc http://127.0.0.1:1/acc box");
    }

    #[test]
    fn credentials_are_of_one_source() {
        let environment = map(&[
            ("AZURE_STORAGE_ACCOUNT_NAME", "acc"),
            ("AZURE_STORAGE_ACCOUNT_KEY", "ENV"),
            ("AZURE_STORAGE_SAS_TOKEN", ""),
        ]);
        let url = Url::parse("az://box/x").unwrap();
        let who = |options: &[(&str, &str)]| {
            let (builder, _) = settings(&url, &map(options), &environment).unwrap();
            let value = |key| builder.get_config_value(&key);
            assert_eq!(value(AzureConfigKey::AccountName).unwrap(), "acc");
            (value(AzureConfigKey::AccessKey), value(AzureConfigKey::SasKey))
        };
        assert_eq!(who(&[]), (Some("ENV".into()), None));
        assert_eq!(who(&[("anon", "false")]), (Some("ENV".into()), None));
        assert_eq!(who(&[("account_key", "OPT")]), (Some("OPT".into()), None));
        assert_eq!(who(&[("sas_token", "sig=x")]), (None, Some("sig=x".into())));
        assert_eq!(who(&[("use_azure_cli", "true")]), (None, None));
        let sas = "SharedAccessSignature=sig=y";
        assert_eq!(who(&[("connection_string", sas)]), (None, Some("sig=y".into())));
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        for (name, value) in [
            ("use_emulator", "hush"),
            ("anon", "hush"),
            ("verify", "hush.pem"),
            ("allow_http", "hush"),
            ("endpoint", "https://u:hush@h"),
            ("acount_key", "hush"),
        ] {
            let options = [(name.to_owned(), value.to_owned())].into();
            let url = Url::parse("az://box/x").unwrap();
            let error = open(&url, &options, &Environment::new()).err().unwrap().to_string();
            assert!(error.contains(&format!("`{name}`")), "{error}");
            assert!(name == "verify" || !error.contains("hush"), "{error}");
        }
    }
}
