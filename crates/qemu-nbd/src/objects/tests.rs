//! Objects as callers write them, and the texts of what is wrong.

use super::*;

fn meant(objects: &[&str], creds: &str, authz: Option<&str>) -> Result<Option<Tls>, String> {
    let words = TlsWords {
        objects: objects.iter().map(|object| (*object).to_owned()).collect(),
        credentials: Some(creds.to_owned()),
        authorization: authz.map(ToOwned::to_owned),
        hostname: None,
    };
    tls(&words, Endpoint::Server)
}

#[test]
fn certificates_are_found_by_their_id() {
    let expected = Tls { directory: "/pki,x".into(), verify_peer: true, allow: None };
    for object in [
        "tls-creds-x509,id=t0,endpoint=server,dir=/pki,,x",
        "qom-type=tls-creds-x509,id=t0,endpoint=server,dir=/pki,,x,verify-peer=on",
        r#"{"qom-type":"tls-creds-x509","id":"t0","endpoint":"server","dir":"/pki,x"}"#,
    ] {
        assert_eq!(meant(&[object], "t0", None), Ok(Some(expected.clone())), "{object}");
    }
    let off = "tls-creds-x509,id=t0,endpoint=server,dir=/p,verify-peer=no,sanity-check=off";
    assert!(!meant(&[off], "t0", None).unwrap().unwrap().verify_peer);
    assert_eq!(tls(&TlsWords::default(), Endpoint::Server), Ok(None));
}

#[test]
fn names_are_those_of_authz_objects() {
    let creds = "tls-creds-x509,id=t,endpoint=server,dir=/p";
    let simple = "authz-simple,id=a,identity=CN=x,,O=y";
    let list = "authz-list,id=a,policy=deny,rules.0.match=CN=x,,O=y,rules.0.policy=allow";
    let json = r#"{"qom-type":"authz-list","id":"a","rules":[
        {"match":"CN=?,O=*","policy":"allow","format":"glob"}]}"#;
    for object in [simple, list, json] {
        let allow = meant(&[object, creds], "t", Some("a")).unwrap().unwrap().allow.unwrap();
        assert!(allow.allows("CN=x,O=y") && !allow.allows("CN=xx,O=y"), "{object}");
    }
}

#[test]
fn what_is_wrong_or_missing_has_qemus_text() {
    let creds = "tls-creds-x509,id=t,endpoint=server,dir=/p";
    for (object, text) in [
        ("bad,id=a", "Parameter 'qom-type' does not accept value 'bad'"),
        ("tls-creds-x509,dir=/p", "Parameter 'id' is missing"),
        ("tls-creds-x509,id=a", "Parameter 'dir' is missing"),
        ("tls-creds-x509,id=a,dir=/p,x=y", "Parameter 'x' is unexpected"),
        (
            "tls-creds-x509,id=a,dir=/p,verify-peer=x",
            "Parameter 'verify-peer' expects 'on' or 'off'",
        ),
        ("tls-creds-x509,id=a,dir", "Expected '=' after parameter 'dir'"),
        ("authz-simple,id=a", "Parameter 'identity' is missing"),
        ("authz-list,id=a,rules.0.match=x", "Parameter 'rules.0.policy' is missing"),
    ] {
        assert_eq!(meant(&[creds, object], "t", None), Err(text.to_owned()), "{object}");
    }
    for kind in ["tls-creds-psk", "tls-creds-anon", "secret", "authz-pam", "authz-list-file"] {
        let error = meant(&[creds, &format!("{kind},id=a")], "t", None).unwrap_err();
        assert!(error.starts_with(&format!("--object {kind} is not supported")), "{error}");
    }
    let text = "Failed to get TLS creds: No TLS credentials with id 'nope'";
    assert_eq!(meant(&[creds], "nope", None), Err(text.to_owned()));
    let client = "tls-creds-x509,id=t,dir=/p";
    let text = "Failed to get TLS creds: Expecting TLS credentials with a server endpoint";
    assert_eq!(meant(&[client], "t", None), Err(text.to_owned()));
    assert!(meant(&[creds], "t", Some("a")).is_err());
    assert!(meant(&[creds, creds], "t", None).unwrap_err().contains("duplicate"));
}
