//! Azure Blob Storage.

use std::str::FromStr;
use std::sync::Arc;

use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::{ClientConfigKey, ObjectStore};
use url::Url;

use super::StorageOptions;
use crate::error::{Error, Result};

const KIND: &str = "Azure";

pub(super) fn open(url: &Url, options: &StorageOptions) -> Result<(Arc<dyn ObjectStore>, String)> {
    let mut keys = Vec::new();
    if let Ok(text) = std::env::var("AZURE_STORAGE_CONNECTION_STRING") {
        keys.extend(connection_string(&text)?);
    }
    for (name, value) in options {
        match name.to_ascii_lowercase().as_str() {
            "connection_string" => keys.extend(connection_string(value)?),
            "credential" => keys.push((AzureConfigKey::AccessKey, value.clone())),
            "anon" => keys.push((AzureConfigKey::SkipSignature, value.clone())),
            "endpoint_url" => keys.push((AzureConfigKey::Endpoint, value.clone())),
            other => {
                let key = AzureConfigKey::from_str(other);
                keys.push((key.map_err(|_| super::unknown(KIND, name))?, value.clone()));
            }
        }
    }
    let endpoint = keys.iter().rev().find(|(k, _)| *k == AzureConfigKey::Endpoint);
    if endpoint.is_some_and(|(_, value)| value.starts_with("http://")) {
        keys.insert(0, (AzureConfigKey::Client(ClientConfigKey::AllowHttp), "true".into()));
    }
    let start = MicrosoftAzureBuilder::from_env()
        .with_url(url.to_string())
        .with_retry(super::retry_config())
        .with_config(AzureConfigKey::Client(ClientConfigKey::Timeout), super::TIMEOUT);
    let builder = keys.into_iter().fold(start, |b, (key, value)| b.with_config(key, value));
    let account = builder.get_config_value(&AzureConfigKey::AccountName).unwrap_or_default();
    let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint).unwrap_or_default();
    let store = builder.build().map_err(|e| super::refused(KIND, &e))?;
    let container = url.host_str().unwrap_or_default();
    Ok((Arc::new(store), format!("{KIND} {account} {endpoint} {container}")))
}

/// The parts of a connection string that say where an account is and who we are.
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
        keys.push((key, value.to_owned()));
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
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
        let (_, server) = open(&Url::parse("az://box/x").unwrap(), &options).unwrap();
        assert_eq!(server, "Azure acc http://127.0.0.1:1/acc box");
    }
}
