//! S3 and servers that speak its protocol.

use std::str::FromStr;
use std::sync::Arc;

use http::HeaderValue;
use object_store::ObjectStore;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use url::Url;

use super::client::{self, Client};
use super::{Environment, StorageOptions, option, profile};
use crate::error::Result;

const KIND: &str = "S3";
const OWNER: &str = "x-amz-expected-bucket-owner";

/// Names of the options, besides those of the client, to suggest one for a typo.
pub(super) const NAMES: [&str; 43] = [
    "access_key_id",
    "addressing_style",
    "anon",
    "aws_access_key_id",
    "aws_endpoint_url",
    "aws_region",
    "aws_secret_access_key",
    "aws_session_token",
    "bucket_key_enabled",
    "bucketkeyenabled",
    "checksum",
    "checksum_algorithm",
    "conditional_put",
    "disable_bulk_delete",
    "disable_tagging",
    "endpoint",
    "endpoint_url",
    "expected_bucket_owner",
    "force_path_style",
    "imdsv1_fallback",
    "key",
    "metadata_endpoint",
    "password",
    "path_style",
    "profile",
    "profile_name",
    "region",
    "region_name",
    "request_payer",
    "requester_pays",
    "role_arn",
    "secret",
    "secret_access_key",
    "server_side_encryption",
    "serversideencryption",
    "session_token",
    "skip_signature",
    "sse_kms_key_id",
    "ssekmskeyid",
    "token",
    "unsigned_payload",
    "username",
    "virtual_hosted_style_request",
];

/// Settings from options, environment or profile.
#[derive(Default)]
struct Settings {
    keys: Vec<(AmazonS3ConfigKey, String)>,
    client: Client,
    owner: Option<HeaderValue>,
    profile: Option<String>,
}

pub(super) fn open(
    url: &Url,
    options: &StorageOptions,
    environment: &Environment,
) -> Result<(Arc<dyn ObjectStore>, String)> {
    let settings = settings(url, options, environment)?;
    let server = settings.server(url);
    let store = settings.builder(url).build().map_err(|e| super::refused(KIND, &e))?;
    Ok((Arc::new(store), server))
}

/// Whether an option is known, whatever its value.
pub(super) fn knows(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    let client = client::NAMES.contains(&client_key(name).as_str());
    client || NAMES.contains(&lower.as_str()) || AmazonS3ConfigKey::from_str(&lower).is_ok()
}

/// Options over environment over profile.
fn settings(url: &Url, options: &StorageOptions, environment: &Environment) -> Result<Settings> {
    let mut given = Settings::default();
    for (key, value) in options {
        given.add(key, value)?;
    }
    let mut inherited = Settings::default();
    let ours = |(name, value): &(&String, &String)| name.starts_with("AWS_") && !value.is_empty();
    for (name, value) in environment.iter().filter(ours) {
        inherited.inherit(name, value)?;
    }
    // A profile that the options name wins over credentials of the environment; one that the
    // environment names, or the default one, does not.
    let named = given.profile.is_some();
    let profile = profile::load(given.profile.as_deref(), environment)?;
    let use_keys = !given.has_credentials() && (named || !inherited.has_credentials());
    let from_profile = profile.settings(use_keys)?;
    given.check_credentials()?;
    let has_id = |(key, _): &(_, _)| *key == AmazonS3ConfigKey::AccessKeyId;
    if given.has_credentials() || from_profile.iter().any(has_id) {
        // Credentials are one set of one source. With another one's session token they are refused,
        // and that token would be sent to a server that it is not meant for.
        inherited.keys.retain(|(key, _)| !is_credential(key));
    }
    let (first, second) = match named {
        true => (inherited.keys, from_profile),
        false => (from_profile, inherited.keys),
    };
    let mut all = Settings::default();
    all.keys.extend(first);
    all.keys.extend(second);
    all.keys.extend(given.keys);
    for (name, bundle) in [
        ("ca_bundle", profile.ca_bundle()),
        ("AWS_CA_BUNDLE", environment.get("AWS_CA_BUNDLE").map(String::as_str)),
    ] {
        if let Some(bundle) = bundle.filter(|bundle| !bundle.is_empty()) {
            all.client.take(name, "ca_bundle", bundle)?;
        }
    }
    for (name, value) in environment.iter().filter(ours).chain(options) {
        all.take_by_client(name, value)?;
    }
    if let Some(owner) = given.owner {
        all.client.header(OWNER, owner);
    }
    if let Some(endpoint) = all.endpoint().map(str::to_owned) {
        // An explicit `http:` is intended.
        if option::address("endpoint", &endpoint)?.starts_with("http://") {
            all.client.allow_http();
        }
    } else if is_amazon(url) {
        all.add_amazon_defaults();
    }
    Ok(all)
}

/// Whether a setting is a credential.
fn is_credential(key: &AmazonS3ConfigKey) -> bool {
    use AmazonS3ConfigKey as K;
    matches!(
        key,
        K::AccessKeyId
            | K::SecretAccessKey
            | K::Token
            | K::SkipSignature
            | K::WebIdentityTokenFile
            | K::ContainerCredentialsRelativeUri
            | K::ContainerCredentialsFullUri
            | K::ContainerAuthorizationTokenFile
    )
}

/// Whether a URL without an endpoint is at Amazon: it names only a bucket, or Amazon's server.
fn is_amazon(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    !matches!(url.scheme(), "http" | "https")
        || [".amazonaws.com", ".amazonaws.com.cn"].iter().any(|domain| host.ends_with(domain))
}

/// The HTTP client's name for an option or variable.
fn client_key(name: &str) -> String {
    let lower = name.to_ascii_lowercase();
    lower.strip_prefix("aws_").unwrap_or(&lower).to_owned()
}

impl Settings {
    /// Takes an option that the caller gave.
    fn add(&mut self, name: &str, value: &str) -> Result<()> {
        let lower = name.to_ascii_lowercase();
        let same = || value.to_owned();
        let (canonical, value) = match lower.as_str() {
            "key" | "username" => ("access_key_id", same()),
            "secret" | "password" => ("secret_access_key", same()),
            "region_name" => ("region", same()),
            "anon" => ("skip_signature", same()),
            "requester_pays" => ("request_payer", same()),
            "addressing_style" => match option::word(name, value, &["auto", "path", "virtual"])? {
                "auto" => return Ok(()),
                style => ("virtual_hosted_style_request", (style == "virtual").to_string()),
            },
            "path_style" | "force_path_style" => {
                ("virtual_hosted_style_request", (!option::boolean(name, value)?).to_string())
            }
            "checksum" => ("checksum_algorithm", same()),
            "serversideencryption" => ("server_side_encryption", same()),
            "ssekmskeyid" => ("sse_kms_key_id", same()),
            "bucketkeyenabled" | "bucket_key_enabled" => ("sse_bucket_key_enabled", same()),
            "expected_bucket_owner" | "expectedbucketowner" => {
                let bad = |_| option::bad(name, "an account number");
                self.owner = Some(HeaderValue::from_str(value).map_err(bad)?);
                return Ok(());
            }
            "profile" | "aws_profile" | "profile_name" => {
                self.profile = Some(same());
                return Ok(());
            }
            other => (other, same()),
        };
        if client::NAMES.contains(&client_key(canonical).as_str()) {
            return Ok(());
        }
        match AmazonS3ConfigKey::from_str(canonical) {
            Ok(key) => self.push(name, key, value),
            Err(_) => Err(option::unknown(KIND, name, &[&NAMES[..], &client::NAMES].concat())),
        }
    }

    /// Takes a variable of the environment, if it is one of ours.
    fn inherit(&mut self, name: &str, value: &str) -> Result<()> {
        match AmazonS3ConfigKey::from_str(&name.to_ascii_lowercase()) {
            Ok(AmazonS3ConfigKey::Client(_)) | Err(_) => Ok(()),
            Ok(key) => self.push(name, key, value.to_owned()),
        }
    }

    /// Takes an option or variable that is meant for the HTTP client. Of variables, only those with
    /// `object_store`'s names are.
    fn take_by_client(&mut self, name: &str, value: &str) -> Result<()> {
        let (lower, key) = (name.to_ascii_lowercase(), client_key(name));
        let variable = name.starts_with("AWS_");
        let ours = match variable {
            true => matches!(lower.parse(), Ok(AmazonS3ConfigKey::Client(_))),
            false => client::NAMES.contains(&key.as_str()),
        };
        if ours {
            self.client.take(name, &key, value)?;
        }
        Ok(())
    }

    fn push(&mut self, name: &str, key: AmazonS3ConfigKey, value: String) -> Result<()> {
        use AmazonS3ConfigKey as K;
        // Most of them become headers, where `object_store` panics at a line break.
        if value.contains(char::is_control) {
            return Err(option::bad(name, "text without line breaks and other control characters"));
        }
        let value = match key {
            K::VirtualHostedStyleRequest
            | K::S3Express
            | K::ImdsV1Fallback
            | K::UnsignedPayload
            | K::SkipSignature
            | K::DisableTagging
            | K::DisableBulkDelete => option::boolean(name, &value)?.to_string(),
            // Its type is private.
            _ if key.as_ref() == "aws_sse_bucket_key_enabled" => {
                option::boolean(name, &value)?.to_string()
            }
            K::RequestPayer => match option::truth(&value) {
                Some(pays) => pays.to_string(),
                None => option::word(name, &value, &["requester", "true", "false"])?.to_owned(),
            },
            K::Checksum => option::word(name, &value, &["none", "sha256", "crc64nvme"])?.to_owned(),
            K::Endpoint | K::S3Endpoint | K::StsEndpoint | K::MetadataEndpoint => {
                option::address(name, &value)?
            }
            _ => value,
        };
        let key = match key {
            // The builder takes it only if no source has a region.
            K::DefaultRegion if self.has(&K::Region) => return Ok(()),
            K::DefaultRegion => K::Region,
            key => key,
        };
        self.keys.push((key, value));
        Ok(())
    }

    /// Refuses a part of a key that the environment or a profile would have to complete.
    fn check_credentials(&self) -> Result<()> {
        use AmazonS3ConfigKey as K;
        let part = [("secret", K::SecretAccessKey), ("token", K::Token)];
        match part.into_iter().find(|(_, key)| self.has(key)) {
            Some((name, _)) if !self.has_credentials() => {
                Err(option::bad(name, "`key` to be set as well"))
            }
            _ => Ok(()),
        }
    }

    fn has_credentials(&self) -> bool {
        use AmazonS3ConfigKey as K;
        self.last(&K::SkipSignature) == Some("true")
            || self.keys.iter().any(|(k, _)| {
                matches!(
                    k,
                    K::AccessKeyId
                        | K::WebIdentityTokenFile
                        | K::ContainerCredentialsRelativeUri
                        | K::ContainerCredentialsFullUri
                )
            })
    }

    /// On Amazon's servers, unless options say otherwise: instead of signing the body, sends a
    /// checksum of it, which the signature covers, as Amazon's own clients do over TLS. It protects
    /// as well and is computed much faster. Other servers may not know the checksum; there the
    /// signature covers the body.
    fn add_amazon_defaults(&mut self) {
        const CHECKSUM: &str = "crc64nvme";
        if !self.has(&AmazonS3ConfigKey::Checksum) {
            self.keys.push((AmazonS3ConfigKey::Checksum, CHECKSUM.into()));
        }
        let tls = self.client.plain() != Some(true);
        let checked = self.last(&AmazonS3ConfigKey::Checksum);
        let checked = checked.is_some_and(|sum| sum.eq_ignore_ascii_case(CHECKSUM));
        if tls && checked && !self.has(&AmazonS3ConfigKey::UnsignedPayload) {
            self.keys.push((AmazonS3ConfigKey::UnsignedPayload, "true".into()));
        }
    }

    fn has(&self, key: &AmazonS3ConfigKey) -> bool {
        self.last(key).is_some()
    }

    /// The value that counts: the last one given.
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

    fn builder(self, url: &Url) -> AmazonS3Builder {
        let (client, connector) = self.client.finish();
        let start = AmazonS3Builder::new()
            .with_url(url.to_string())
            .with_retry(client::retry_config())
            .with_client_options(client)
            .with_http_connector(connector);
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
        keys.fold(start, |builder, (_, (key, value))| builder.with_config(*key, value))
    }
}

#[cfg(test)]
mod tests {
    use super::option::map;
    use super::*;

    fn built(options: &[(&str, &str)], environment: &[(&str, &str)]) -> AmazonS3Builder {
        built_at("s3://bucket/prefix", options, environment)
    }

    fn built_at(
        url: &str,
        options: &[(&str, &str)],
        environment: &[(&str, &str)],
    ) -> AmazonS3Builder {
        let url = Url::parse(url).unwrap();
        settings(&url, &map(options), &map(environment)).unwrap().builder(&url)
    }

    /// A home folder with profiles: the default one, another one, and one without keys.
    fn home() -> tempfile::TempDir {
        let home = tempfile::tempdir().unwrap();
        let aws = home.path().join(".aws");
        std::fs::create_dir(&aws).unwrap();
        let credentials = "[default]\naws_access_key_id = FILE\naws_secret_access_key = s\n\
                           [other]\naws_access_key_id = OTHER\naws_secret_access_key = s\n\
                           [bare]\nregion = eu-bare\n";
        std::fs::write(aws.join("credentials"), credentials).unwrap();
        std::fs::write(aws.join("config"), "[default]\nregion = eu-file\n").unwrap();
        home
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
        assert_eq!(value(&b, "timeout"), None);
        assert_eq!(value(&b, "connect_timeout").unwrap(), "10s");
    }

    #[test]
    fn options_win_over_the_environment_and_that_over_the_profile() {
        let home = home();
        let home = home.path().to_str().unwrap();
        let id = |b: &AmazonS3Builder| value(b, "access_key_id").unwrap();

        let b = built(&[], &[("HOME", home)]);
        assert_eq!((id(&b), value(&b, "region").unwrap()), ("FILE".into(), "eu-file".into()));
        assert_eq!(value(&b, "checksum_algorithm").unwrap(), "crc64nvme");
        assert_eq!(id(&built(&[("anon", "false")], &[("HOME", home)])), "FILE");
        let anonymous = built(&[("anon", "true")], &[("HOME", home)]);
        assert_eq!(value(&anonymous, "access_key_id"), None);
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
    fn credentials_are_of_one_source() {
        let home = home();
        let home = home.path().to_str().unwrap();
        let who = |options: &[(&str, &str)], env: &[(&str, &str)]| {
            let b = built(options, &[env, &[("HOME", home)]].concat());
            (value(&b, "access_key_id").unwrap(), value(&b, "session_token"))
        };
        let token = ("AWS_SESSION_TOKEN", "T");
        let env = [("AWS_ACCESS_KEY_ID", "ENV"), ("AWS_SECRET_ACCESS_KEY", "x"), token];
        let own = [("key", "OPT"), ("secret", "x")];
        assert_eq!(who(&[], &env), ("ENV".into(), Some("T".into())));
        assert_eq!(who(&own, &env), ("OPT".into(), None));
        assert_eq!(who(&[("profile", "other")], &env), ("OTHER".into(), None));
        assert_eq!(who(&[("profile", "bare")], &env), ("ENV".into(), Some("T".into())));
        // One that is left over from an earlier session.
        assert_eq!(who(&[], &[token]), ("FILE".into(), None));
        // Nor are those of the options left unused.
        let unsigned = [("AWS_SKIP_SIGNATURE", "true"), ("HOME", home)];
        assert_eq!(value(&built(&own, &unsigned), "skip_signature").unwrap(), "false");
        for part in [("token", "hush"), ("secret", "hush")] {
            let error = refusal(&[part], &env);
            assert!(error.contains(part.0) && !error.contains("hush"), "{error}");
        }
        // Where the server is comes from the environment before a default profile, too.
        let region = |env: &[(&str, &str)]| {
            value(&built(&own, &[env, &[("HOME", home)]].concat()), "region").unwrap()
        };
        let usual = ("AWS_DEFAULT_REGION", "eu-usual");
        assert_eq!(region(&[]), "eu-file");
        assert_eq!(region(&[usual]), "eu-usual");
        assert_eq!(region(&[usual, ("AWS_REGION", "eu-now")]), "eu-now");
    }

    #[test]
    fn line_breaks_are_refused_by_name() {
        let url = Url::parse("s3://bucket").unwrap();
        let none = map(&[("HOME", "/nowhere")]);
        for name in ["key", "secret", "token", "region", "sse_kms_key_id"] {
            let options = map(&[("key", "K"), ("secret", "S"), (name, "hidden\n")]);
            let error = settings(&url, &options, &none).err().unwrap().to_string();
            assert!(error.contains(&format!("`{name}`")) && !error.contains("hidden"), "{error}");
        }
        let inherited = map(&[("HOME", "/nowhere"), ("AWS_SECRET_ACCESS_KEY", "hidden\n")]);
        let error = settings(&url, &map(&[]), &inherited).err().unwrap().to_string();
        assert!(error.contains("`AWS_SECRET_ACCESS_KEY`"), "{error}");
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

    fn refusal(options: &[(&str, &str)], environment: &[(&str, &str)]) -> String {
        let url = Url::parse("s3://bucket/prefix").unwrap();
        match settings(&url, &map(options), &map(environment)) {
            Ok(_) => panic!("{options:?} {environment:?}"),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        for (name, value) in [
            ("verify", "/no/such/hush.pem"),
            ("verify", ""),
            ("use_ssl", "hush"),
            ("allow_http", "hush"),
            ("allow_invalid_certificates", "hush"),
            ("anon", "hush"),
            ("path_style", "hush"),
            ("addressing_style", "hush"),
            ("requester_pays", "hush"),
            ("checksum", "hush"),
            ("unsigned_payload", "hush"),
            ("BucketKeyEnabled", "hush"),
            ("connect_timeout", "hush"),
            ("connect_timeout", "-1"),
            ("pool_max_idle_per_host", "1e9"),
            ("endpoint_url", "https://u:hush@host"),
            ("endpoint_url", "127.0.0.1:9000"),
        ] {
            let error = refusal(&[(name, value)], &[("HOME", "/nowhere")]);
            assert!(error.contains(&format!("`{name}`")), "{error}");
            assert!(name == "verify" || !error.contains("hush"), "{error}");
        }
        for (slip, meant) in [("endpont_url", "endpoint_url"), ("verfy", "verify")] {
            let error = refusal(&[(slip, "hush")], &[("HOME", "/nowhere")]);
            assert!(error.contains(slip) && error.contains(&format!("`{meant}`")), "{error}");
        }
        let error = refusal(&[], &[("AWS_ALLOW_HTTP", "hush"), ("HOME", "/nowhere")]);
        assert!(error.contains("`AWS_ALLOW_HTTP`"), "{error}");
        // Variables that other tools may have set are ignored.
        let env = [("AWS_MAX_ATTEMPTS", "x"), ("timeout", "x"), ("AWS_ENDPOINT_URL", "")];
        built(&[], &env);
    }

    #[test]
    fn certificates_are_checked_unless_an_option_says_no() {
        let checks = |options: &[(&str, &str)]| {
            let b = built(options, &[("HOME", "/nowhere")]);
            value(&b, "allow_invalid_certificates").unwrap() == "false"
        };
        assert!(checks(&[]) && checks(&[("verify", "True")]));
        assert!(!checks(&[("verify", "False")]));
        let bundle = format!("{}/tests/tls/ca.pem", env!("CARGO_MANIFEST_DIR"));
        let b = built(&[("verify", &bundle)], &[("HOME", "/nowhere")]);
        assert_eq!(value(&b, "allow_invalid_certificates").unwrap(), "false");
        assert_eq!(value(&b, "disable_system_certificates").unwrap(), "true");
        let b = built(&[], &[("HOME", "/nowhere"), ("AWS_CA_BUNDLE", &bundle)]);
        assert_eq!(value(&b, "disable_system_certificates").unwrap(), "true");
        let folder = tempfile::tempdir().unwrap();
        let no_pem = folder.path().join("x");
        std::fs::write(&no_pem, "no certificate").unwrap();
        for wrong in [folder.path(), no_pem.as_path()] {
            let error = refusal(&[("verify", wrong.to_str().unwrap())], &[("HOME", "/nowhere")]);
            assert!(error.contains("PEM file"), "{error}");
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
