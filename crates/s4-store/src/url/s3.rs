//! S3 and what speaks its protocol.

use std::str::FromStr;
use std::sync::Arc;

use http::{HeaderMap, HeaderValue};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::{ClientConfigKey, ClientOptions, ObjectStore};
use url::Url;

use super::{Environment, StorageOptions, profile};
use crate::error::{Error, Result};

const KIND: &str = "S3";
const OWNER: &str = "x-amz-expected-bucket-owner";

/// What a URL, options and environment come to.
#[derive(Default)]
struct Settings {
    keys: Vec<(AmazonS3ConfigKey, String)>,
    bucket_owner: Option<String>,
    profile: Option<String>,
}

pub(super) fn open(
    url: &Url,
    options: &StorageOptions,
    environment: &Environment,
) -> Result<(Arc<dyn ObjectStore>, String)> {
    let settings = settings(url, options, environment)?;
    let server = settings.server(url);
    let builder = settings.builder(url)?;
    let store = builder.build().map_err(|e| super::refused(KIND, &e))?;
    Ok((Arc::new(store), server))
}

/// Options over environment over profile.
fn settings(url: &Url, options: &StorageOptions, environment: &Environment) -> Result<Settings> {
    let mut given = Settings::default();
    for (key, value) in options {
        given.add(key, value)?;
    }
    let mut all = Settings { bucket_owner: given.bucket_owner, ..Settings::default() };
    let inherited = environment_keys(environment);
    let has_keys = |keys: &[(AmazonS3ConfigKey, String)]| {
        keys.iter().any(|(k, _)| {
            matches!(
                k,
                AmazonS3ConfigKey::AccessKeyId
                    | AmazonS3ConfigKey::SkipSignature
                    | AmazonS3ConfigKey::WebIdentityTokenFile
                    | AmazonS3ConfigKey::ContainerCredentialsRelativeUri
                    | AmazonS3ConfigKey::ContainerCredentialsFullUri
            )
        })
    };
    // A profile that the options name wins over credentials of the environment; one that the
    // environment names, or the default one, does not.
    let named = given.profile.is_some();
    let profile = profile::load(given.profile.as_deref(), environment)?;
    let use_keys = !has_keys(&given.keys) && (named || !has_keys(&inherited));
    let from_profile = profile.settings(use_keys)?;
    let (first, second) = if named { (inherited, from_profile) } else { (from_profile, inherited) };
    all.keys.extend(first);
    all.keys.extend(second);
    all.keys.extend(given.keys);
    if let Some(endpoint) = all.endpoint().map(str::to_owned) {
        // Who writes `http:` means it.
        let allow = AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp);
        if endpoint.starts_with("http://") && !all.has(&allow) {
            all.keys.push((allow, "true".into()));
        }
    } else if is_amazon(url) {
        all.add_amazon_defaults();
    }
    Ok(all)
}

/// Whether an address without an endpoint is one of Amazon's: it names a bucket alone, or their server.
fn is_amazon(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    !matches!(url.scheme(), "http" | "https")
        || [".amazonaws.com", ".amazonaws.com.cn"].iter().any(|domain| host.ends_with(domain))
}

fn environment_keys(environment: &Environment) -> Vec<(AmazonS3ConfigKey, String)> {
    let ours = environment.iter().filter(|(name, _)| name.starts_with("AWS_"));
    let key = |name: &str| AmazonS3ConfigKey::from_str(&name.to_ascii_lowercase()).ok();
    ours.filter_map(|(name, value)| Some((key(name)?, value.clone()))).collect()
}

impl Settings {
    fn add(&mut self, name: &str, value: &str) -> Result<()> {
        let lower = name.to_ascii_lowercase();
        let same = || value.to_owned();
        let (canonical, value) = match lower.as_str() {
            "key" | "username" => ("access_key_id", same()),
            "secret" | "password" => ("secret_access_key", same()),
            "region_name" => ("region", same()),
            "anon" => ("skip_signature", same()),
            "requester_pays" => ("request_payer", same()),
            "addressing_style" => {
                ("virtual_hosted_style_request", value.eq_ignore_ascii_case("virtual").to_string())
            }
            "path_style" | "force_path_style" => {
                ("virtual_hosted_style_request", super::opposite(value))
            }
            "use_ssl" => ("allow_http", super::opposite(value)),
            "verify" => ("allow_invalid_certificates", super::opposite(value)),
            "checksum" => ("checksum_algorithm", same()),
            "serversideencryption" => ("server_side_encryption", same()),
            "ssekmskeyid" => ("sse_kms_key_id", same()),
            "bucketkeyenabled" => ("sse_bucket_key_enabled", same()),
            "expected_bucket_owner" | "expectedbucketowner" => {
                self.bucket_owner = Some(same());
                return Ok(());
            }
            "profile" | "aws_profile" | "profile_name" => {
                self.profile = Some(same());
                return Ok(());
            }
            other => (other, same()),
        };
        let key = AmazonS3ConfigKey::from_str(canonical);
        self.keys.push((key.map_err(|_| super::unknown(KIND, name))?, value));
        Ok(())
    }

    /// On Amazon's servers, what nobody asked for otherwise: a checksum of the body, which the signature
    /// covers, in place of a signature of the body, as Amazon's own clients do over TLS. It guards as much
    /// and is computed much faster. Other servers may not know it; the signature covers the body there.
    fn add_amazon_defaults(&mut self) {
        const CHECKSUM: &str = "crc64nvme";
        if !self.has(&AmazonS3ConfigKey::Checksum) {
            self.keys.push((AmazonS3ConfigKey::Checksum, CHECKSUM.into()));
        }
        let plain = AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp);
        let tls = self.last(&plain).is_none_or(|http| http.eq_ignore_ascii_case("false"));
        let checked = self.last(&AmazonS3ConfigKey::Checksum);
        let checked = checked.is_some_and(|sum| sum.eq_ignore_ascii_case(CHECKSUM));
        if tls && checked && !self.has(&AmazonS3ConfigKey::UnsignedPayload) {
            self.keys.push((AmazonS3ConfigKey::UnsignedPayload, "true".into()));
        }
    }

    fn has(&self, key: &AmazonS3ConfigKey) -> bool {
        self.last(key).is_some()
    }

    /// The value that counts.
    fn last(&self, key: &AmazonS3ConfigKey) -> Option<&str> {
        self.keys.iter().rev().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }

    fn endpoint(&self) -> Option<&str> {
        let ours = |k: &AmazonS3ConfigKey| {
            matches!(k, AmazonS3ConfigKey::Endpoint | AmazonS3ConfigKey::S3Endpoint)
        };
        self.keys.iter().rev().find(|(k, _)| ours(k)).map(|(_, value)| value.as_str())
    }

    fn server(&self, url: &Url) -> String {
        let bucket = url.host_str().unwrap_or_default();
        format!("{KIND} {} {bucket}", self.endpoint().unwrap_or("amazonaws.com"))
    }

    fn builder(self, url: &Url) -> Result<AmazonS3Builder> {
        let mut client = ClientOptions::new().with_config(ClientConfigKey::Timeout, super::TIMEOUT);
        if let Some(owner) = self.bucket_owner {
            let bad = |_| Error::Argument("the expected bucket owner is no account number".into());
            let mut headers = HeaderMap::new();
            headers.insert(OWNER, HeaderValue::from_str(&owner).map_err(bad)?);
            client = client.with_default_headers(headers);
        }
        let start = AmazonS3Builder::new()
            .with_url(url.to_string())
            .with_retry(super::retry_config())
            .with_client_options(client);
        // The environment's endpoint for S3 alone would win over the caller's endpoint.
        let last = self.keys.iter().rposition(|(k, _)| *k == AmazonS3ConfigKey::Endpoint);
        let beaten = |i: usize, k: &AmazonS3ConfigKey| {
            *k == AmazonS3ConfigKey::S3Endpoint && last.is_some_and(|last| i < last)
        };
        let none = |k: &AmazonS3ConfigKey, value: &str| {
            *k == AmazonS3ConfigKey::Checksum && value.eq_ignore_ascii_case("none")
        };
        let all = self.keys.iter().enumerate();
        let keys = all.filter(|(i, (k, value))| !beaten(*i, k) && !none(k, value));
        Ok(keys.fold(start, |builder, (_, (key, value))| builder.with_config(*key, value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> StorageOptions {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn built(options: &[(&str, &str)], environment: &[(&str, &str)]) -> AmazonS3Builder {
        built_at("s3://bucket/prefix", options, environment)
    }

    fn built_at(
        url: &str,
        options: &[(&str, &str)],
        environment: &[(&str, &str)],
    ) -> AmazonS3Builder {
        let url = Url::parse(url).unwrap();
        settings(&url, &map(options), &map(environment)).unwrap().builder(&url).unwrap()
    }

    fn value(builder: &AmazonS3Builder, key: &str) -> Option<String> {
        builder.get_config_value(&key.parse().unwrap())
    }

    #[test]
    fn names_of_other_tools_are_understood() {
        let b = built(
            &[
                ("key", "K"),
                ("secret", "S"),
                ("token", "T"),
                ("endpoint_url", "http://127.0.0.1:9"),
                ("region_name", "r"),
                ("addressing_style", "virtual"),
                ("ServerSideEncryption", "aws:kms"),
                ("SSEKMSKeyId", "kms"),
                ("expected_bucket_owner", "123456789012"),
            ],
            &[("HOME", "/nowhere")],
        );
        assert_eq!(value(&b, "access_key_id").unwrap(), "K");
        assert_eq!(value(&b, "secret_access_key").unwrap(), "S");
        assert_eq!(value(&b, "session_token").unwrap(), "T");
        assert_eq!(value(&b, "endpoint").unwrap(), "http://127.0.0.1:9");
        assert_eq!(value(&b, "region").unwrap(), "r");
        assert_eq!(value(&b, "allow_http").unwrap(), "true");
        assert_eq!(value(&b, "virtual_hosted_style_request").unwrap(), "true");
        assert_eq!(value(&b, "aws_sse_kms_key_id").unwrap(), "kms");
        assert_eq!(value(&b, "checksum_algorithm"), None);
        assert_eq!(value(&b, "timeout").unwrap(), "300s");
    }

    #[test]
    fn options_win_over_the_environment_and_that_over_the_profile() {
        let home = tempfile::tempdir().unwrap();
        let aws = home.path().join(".aws");
        std::fs::create_dir(&aws).unwrap();
        let credentials = "[default]\naws_access_key_id = FILE\naws_secret_access_key = s\n\
                           [other]\naws_access_key_id = OTHER\naws_secret_access_key = s\n";
        std::fs::write(aws.join("credentials"), credentials).unwrap();
        std::fs::write(aws.join("config"), "[default]\nregion = eu-file\n").unwrap();
        let home = home.path().to_str().unwrap();
        let id = |b: &AmazonS3Builder| value(b, "access_key_id").unwrap();

        let b = built(&[], &[("HOME", home)]);
        assert_eq!((id(&b), value(&b, "region").unwrap()), ("FILE".into(), "eu-file".into()));
        assert_eq!(value(&b, "checksum_algorithm").unwrap(), "crc64nvme");
        let env = [("HOME", home), ("AWS_ACCESS_KEY_ID", "ENV"), ("AWS_SECRET_ACCESS_KEY", "x")];
        let b = built(&[], &env);
        assert_eq!((id(&b), value(&b, "region").unwrap()), ("ENV".into(), "eu-file".into()));
        assert_eq!(id(&built(&[("key", "OPT"), ("secret", "x")], &env)), "OPT");
        assert_eq!(id(&built(&[("profile", "other")], &env)), "OTHER");
        assert_eq!(id(&built(&[], &[("HOME", home), ("AWS_PROFILE", "other")])), "OTHER");
        let url = Url::parse("s3://bucket").unwrap();
        assert!(settings(&url, &map(&[("profile", "none")]), &map(&env)).is_err());
    }

    #[test]
    fn checksums_can_be_switched_off() {
        let b = built(&[("checksum", "none")], &[("HOME", "/nowhere")]);
        assert_eq!(value(&b, "checksum_algorithm"), None);
    }

    #[test]
    fn a_body_is_signed_unless_tls_and_a_checksum_guard_it() {
        let unsigned = |options: &[(&str, &str)]| {
            value(&built(options, &[("HOME", "/nowhere")]), "unsigned_payload").unwrap()
        };
        assert_eq!(unsigned(&[]), "true");
        assert_eq!(unsigned(&[("checksum", "CRC64NVME")]), "true");
        for other in [
            ("checksum", "none"),
            ("checksum", "sha256"),
            ("use_ssl", "false"),
            ("allow_http", "1"),
            ("unsigned_payload", "false"),
            ("endpoint_url", "https://other"),
        ] {
            assert_eq!(unsigned(&[other]), "false", "{other:?}");
        }
        // Other servers have addresses of their own.
        for (url, amazon) in [
            ("https://bucket.s3.eu-west-1.amazonaws.com", true),
            ("https://account.r2.cloudflarestorage.com/bucket", false),
        ] {
            let b = built_at(url, &[], &[("HOME", "/nowhere")]);
            assert_eq!(value(&b, "checksum_algorithm").is_some(), amazon, "{url}");
            assert_eq!(value(&b, "unsigned_payload").unwrap(), amazon.to_string(), "{url}");
        }
    }

    #[test]
    fn the_callers_endpoint_wins() {
        let env = [("AWS_ENDPOINT_URL_S3", "https://env"), ("HOME", "/nowhere")];
        let b = built(&[("endpoint_url", "https://mine")], &env);
        assert_eq!(value(&b, "endpoint").unwrap(), "https://mine");
        assert_eq!(value(&b, "aws_endpoint_url_s3"), None);
        let b = built(&[], &env);
        assert_eq!(value(&b, "aws_endpoint_url_s3").unwrap(), "https://env");
    }
}
