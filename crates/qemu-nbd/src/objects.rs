//! `--object`: certificates, and who may connect.
//!
//! Promises: pure. An object that we do not have is refused by its name; of those that we have,
//! properties that we do not have.
//! Source: QEMU's documentation of tls-creds-x509, authz-simple and authz-list.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ringdisk_disk::name::option_words;
use ringdisk_tls::{AllowList, Match, Rule};
use serde_json::Value;

use crate::options::TlsWords;

/// Which side needs the certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `endpoint=server`
    Server,
    /// `endpoint=client`
    Client,
}

/// What `--tls-creds`, `--tls-authz` and `--tls-hostname` mean together with the objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// Directory of the certificates.
    pub directory: PathBuf,
    /// Whether the peer needs a certificate.
    pub verify_peer: bool,
    /// Which names may come; `None`: all with a good certificate.
    pub allow: Option<AllowList>,
}

/// Properties of an object by their names.
type Properties = BTreeMap<String, String>;

/// An object.
#[derive(Debug)]
enum Object {
    Certificates { endpoint: Endpoint, directory: PathBuf, verify_peer: bool },
    Authorization(AllowList),
}

/// The meaning of the words about TLS. `None`: no `--tls-creds`. All objects are judged.
///
/// Errors: the text for people, that of `qemu-nbd` where that has the object, too.
pub fn tls(words: &TlsWords, endpoint: Endpoint) -> Result<Option<Tls>, String> {
    let mut objects: BTreeMap<String, Object> = BTreeMap::new();
    for text in &words.objects {
        let (id, object) = object(text)?;
        if objects.insert(id.clone(), object).is_some() {
            return Err(format!(
                "attempt to add duplicate property '{id}' to object (type \
                                'container')"
            ));
        }
    }
    let Some(id) = &words.credentials else { return Ok(None) };
    let cannot = |why: String| format!("Failed to get TLS creds: {why}");
    let (is_for, directory, verify_peer) = match objects.get(id) {
        None => return Err(cannot(format!("No TLS credentials with id '{id}'"))),
        Some(Object::Authorization(_)) => {
            return Err(cannot(format!("Object with id '{id}' is not TLS credentials")));
        }
        Some(Object::Certificates { endpoint, directory, verify_peer }) => {
            (*endpoint, directory.clone(), *verify_peer)
        }
    };
    if is_for != endpoint {
        let name = if endpoint == Endpoint::Server { "server" } else { "client" };
        return Err(cannot(format!("Expecting TLS credentials with a {name} endpoint")));
    }
    let allow = match &words.authorization {
        None => None,
        Some(id) => match objects.get(id) {
            Some(Object::Authorization(list)) => Some(list.clone()),
            _ => {
                return Err(format!(
                    "no authz object with id '{id}': every client would be denied"
                ));
            }
        },
    };
    Ok(Some(Tls { directory, verify_peer, allow }))
}

/// One object, and its id.
fn object(text: &str) -> Result<(String, Object), String> {
    let mut properties = properties(text)?;
    let missing = |name: &str| format!("Parameter '{name}' is missing");
    let kind = properties.remove("qom-type").ok_or_else(|| missing("qom-type"))?;
    let supported = ["tls-creds-x509", "authz-simple", "authz-list"];
    if !supported.contains(&kind.as_str()) {
        return Err(match kind.as_str() {
            "tls-creds-psk" | "tls-creds-anon" => format!(
                "--object {kind} is not supported: use certificates (tls-creds-x509), which both \
                 sides can check"
            ),
            "secret" | "secret_keyring" => format!(
                "--object {kind} is not supported: store keys without a password, readable by \
                 their owner only"
            ),
            "authz-list-file" | "authz-pam" => {
                format!("--object {kind} is not supported: use authz-list, or authz-simple")
            }
            kind => format!("Parameter 'qom-type' does not accept value '{kind}'"),
        });
    }
    let id = properties.remove("id").ok_or_else(|| missing("id"))?;
    let object = match kind.as_str() {
        "tls-creds-x509" => certificates(&mut properties)?,
        "authz-simple" => {
            let identity = properties.remove("identity").ok_or_else(|| missing("identity"))?;
            Object::Authorization(AllowList::exact([identity]))
        }
        _ => Object::Authorization(rules(&mut properties)?),
    };
    match properties.keys().next() {
        Some(name) => Err(format!("Parameter '{name}' is unexpected")),
        None => Ok((id, object)),
    }
}

fn certificates(properties: &mut Properties) -> Result<Object, String> {
    let directory = properties.remove("dir").ok_or("Parameter 'dir' is missing")?.into();
    let endpoint = match properties.remove("endpoint").as_deref() {
        // As QEMU, where it is left out.
        None | Some("client") => Endpoint::Client,
        Some("server") => Endpoint::Server,
        Some(other) => {
            return Err(format!("Parameter 'endpoint' does not accept value '{other}'"));
        }
    };
    let verify_peer = boolean(properties, "verify-peer")?.unwrap_or(true);
    // Certificates are always looked at.
    boolean(properties, "sanity-check")?;
    if properties.contains_key("passwordid") {
        return Err(String::from(
            "tls-creds-x509: 'passwordid' is not supported: store the key without a password",
        ));
    }
    if properties.contains_key("priority") {
        return Err(String::from(
            "tls-creds-x509: 'priority' is not supported: TLS 1.3 and 1.2 are used, with ciphers \
             that are taken for safe",
        ));
    }
    Ok(Object::Certificates { endpoint, directory, verify_peer })
}

fn boolean(properties: &mut Properties, name: &str) -> Result<Option<bool>, String> {
    match properties.remove(name).as_deref() {
        None => Ok(None),
        Some("on" | "yes" | "true" | "y") => Ok(Some(true)),
        Some("off" | "no" | "false" | "n") => Ok(Some(false)),
        Some(_) => Err(format!("Parameter '{name}' expects 'on' or 'off'")),
    }
}

/// `policy=deny,rules.0.match=NAME,rules.0.policy=allow,rules.0.format=glob`
fn rules(properties: &mut Properties) -> Result<AllowList, String> {
    let allows = |value: Option<String>, name: &str| match value.as_deref() {
        None | Some("deny") => Ok(false),
        Some("allow") => Ok(true),
        Some(other) => Err(format!("Parameter '{name}' does not accept value '{other}'")),
    };
    let allows_others = allows(properties.remove("policy"), "policy")?;
    let mut rules = Vec::new();
    for number in 0.. {
        let prefix = format!("rules.{number}.");
        if !properties.keys().any(|name| name.starts_with(&prefix)) {
            break;
        }
        let mut take = |name: &str| properties.remove(&format!("{prefix}{name}"));
        let name = take("match").ok_or_else(|| format!("Parameter '{prefix}match' is missing"))?;
        let policy = take("policy");
        if policy.is_none() {
            return Err(format!("Parameter '{prefix}policy' is missing"));
        }
        let allows = allows(policy, &format!("{prefix}policy"))?;
        let names = match take("format").as_deref() {
            None | Some("exact") => Match::Exact(name),
            Some("glob") => Match::Glob(name),
            Some(other) => {
                let text = format!("Parameter '{prefix}format' does not accept value '{other}'");
                return Err(text);
            }
        };
        rules.push(Rule { names, allows });
    }
    Ok(AllowList { rules, allows_others })
}

/// `TYPE,KEY=VALUE,…`, or a JSON object.
fn properties(text: &str) -> Result<Properties, String> {
    let mut properties = Properties::new();
    if text.starts_with('{') {
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        flatten(&value, "", &mut properties);
        return Ok(properties);
    }
    for (at, word) in option_words(text).into_iter().enumerate() {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, value),
            None if at == 0 => ("qom-type", word.as_str()),
            None => return Err(format!("Expected '=' after parameter '{word}'")),
        };
        properties.insert(name.to_owned(), value.to_owned());
    }
    Ok(properties)
}

/// Members of members get names with dots.
fn flatten(value: &Value, name: &str, properties: &mut Properties) {
    let below = |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
    match value {
        Value::Object(members) => {
            members.iter().for_each(|(key, value)| flatten(value, &below(key), properties));
        }
        Value::Array(values) => {
            let values = values.iter().enumerate();
            values.for_each(|(at, value)| flatten(value, &below(&at.to_string()), properties));
        }
        Value::String(text) => {
            properties.insert(name.to_owned(), text.clone());
        }
        value => {
            properties.insert(name.to_owned(), value.to_string());
        }
    }
}

#[cfg(test)]
mod tests;
