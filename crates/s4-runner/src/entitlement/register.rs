//! AWS Marketplace's RegisterUsage, once at boot.

use std::sync::Arc;

use object_store::aws::{AmazonS3Builder, AwsAuthorizer, AwsCredential};
use serde::Deserialize;
use uuid::Uuid;

use super::jwt::Key;
use super::{No, Settings};
use crate::imds::{Imds, bounded};

/// The action, as the service's protocol names it.
const TARGET: &str = "AWSMPMeteringService.RegisterUsage";

/// The reply of a successful call. Either member may be missing.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Reply {
    signature: Option<String>,
    public_key_rotation_timestamp: Option<serde_json::Value>,
}

/// Whether it can be the name of a region.
pub(super) fn is_region(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
}

/// Asks once.
pub(super) async fn ask(settings: &Settings, key: &Key, imds: &Imds) -> Result<(), No> {
    let region = match &settings.region {
        Some(region) => region.clone(),
        None => imds.get("/latest/meta-data/placement/region").await?,
    };
    if !is_region(&region) {
        return Err(No::new("invalid_region", "the region name is invalid"));
    }
    let nonce = Uuid::new_v4().simple().to_string();
    let (status, kind, body) = send(settings, &region, &nonce).await?;
    if status == 200 {
        return check(&body, settings, key, &nonce);
    }
    let kind = kind.unwrap_or_else(|| named(&body));
    Err(refusal(status, &kind))
}

fn check(body: &[u8], settings: &Settings, key: &Key, nonce: &str) -> Result<(), No> {
    let reply: Reply = serde_json::from_slice(body)
        .map_err(|_| No::new("malformed_reply", "the reply is not a RegisterUsage response"))?;
    let token = reply.signature.filter(|token| !token.is_empty());
    let token = token.ok_or_else(|| No::new("unsigned_reply", "the reply has no signature"))?;
    key.check(&token, settings, nonce)?;
    if reply.public_key_rotation_timestamp.is_some() {
        tracing::warn!("the key that signs replies will be replaced: configure the next version");
    }
    Ok(())
}

/// Classifies an error of the service.
fn refusal(status: u16, kind: &str) -> No {
    let code = match kind {
        "CustomerNotEntitledException" => "not_entitled",
        "PlatformNotSupportedException" => "platform_not_supported",
        "InvalidProductCodeException" => "invalid_product_code",
        "InvalidPublicKeyVersionException" => "invalid_public_key_version",
        "InvalidRegionException" => "invalid_region",
        "DisabledApiException" => "disabled",
        "AccessDeniedException" | "UnrecognizedClientException" => "access_denied",
        "ThrottlingException" | "InternalServiceErrorException" => {
            return No::Again(format!("{kind} (status {status})"));
        }
        _ if status >= 500 || status == 429 => return No::Again(format!("status {status}")),
        _ => "refused",
    };
    No::new(code, format!("AWS Marketplace returned {kind} (status {status})"))
}

/// The kind of an error, from a reply's body. Nothing else of the body is passed on.
fn named(body: &[u8]) -> String {
    let value: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    short(value["__type"].as_str().unwrap_or("an unknown error"))
}

/// Shortens an error's kind: to `CustomerNotEntitledException` from
/// `com.amazonaws...#CustomerNotEntitledException:http://...`.
fn short(kind: &str) -> String {
    let kind = kind.rsplit('#').next().unwrap_or_default();
    let kind = kind.split(':').next().unwrap_or_default();
    kind.chars().filter(|c| c.is_ascii_alphanumeric() || *c == ' ').take(60).collect()
}

/// Sends the signed request: status, the kind of an error if a header names it, and the body.
async fn send(
    settings: &Settings,
    region: &str,
    nonce: &str,
) -> Result<(u16, Option<String>, Vec<u8>), No> {
    let endpoint = match &settings.endpoint {
        Some(endpoint) => endpoint.trim_end_matches('/').to_owned(),
        None => format!("https://metering.marketplace.{region}.amazonaws.com"),
    };
    let body = serde_json::json!({
        "ProductCode": settings.product_code,
        "PublicKeyVersion": settings.public_key_version,
        "Nonce": nonce,
    })
    .to_string();
    let request = http::Request::post(format!("{endpoint}/"))
        .header("content-type", "application/x-amz-json-1.1")
        .header("x-amz-target", TARGET)
        .body(object_store::client::HttpRequestBody::from(body.clone()));
    let mut request = request.map_err(|e| No::new("configuration", e.to_string()))?;
    let credential = credential(region).await?;
    AwsAuthorizer::new(&credential, "aws-marketplace", region)
        .try_authorize(&mut request, None)
        .map_err(|e| No::new("configuration", e.to_string()))?;
    let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build();
    let client = client.map_err(|e| No::new("configuration", e.to_string()))?;
    let sent = client.post(format!("{endpoint}/")).headers(request.headers().clone()).body(body);
    let answer = sent.send().await.map_err(|e| No::Again(e.without_url().to_string()))?;
    let status = answer.status().as_u16();
    let kind = answer.headers().get("x-amzn-errortype");
    let kind = kind.and_then(|k| k.to_str().ok()).map(short);
    Ok((status, kind, bounded(answer).await.map_err(No::Again)?))
}

/// The machine's credentials: from the environment, or its role.
async fn credential(region: &str) -> Result<Arc<AwsCredential>, No> {
    let no = |e: object_store::Error| No::Again(format!("no credentials: {e}"));
    let builder = AmazonS3Builder::from_env().with_bucket_name("none").with_region(region);
    let client = builder.build().map_err(no)?;
    client.credentials().get_credential().await.map_err(no)
}
