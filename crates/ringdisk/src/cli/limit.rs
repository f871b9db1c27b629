//! The words of `--limit`.

use ringdisk_throttle::Limits;

/// One `--limit`: fields, and the name of a group.
#[derive(Clone, Debug)]
pub(crate) struct LimitWords {
    /// `NAME=VALUE,…`; may be empty.
    pub(crate) fields: String,
    pub(crate) group: Option<String>,
}

/// Reads one `--limit`. Fields that need one another may stand in several.
pub(crate) fn parse_limits(text: &str) -> Result<LimitWords, String> {
    let (mut fields, mut group) = (Vec::new(), None);
    for part in text.split(',') {
        match part.trim().strip_prefix("group=") {
            Some("") => return Err(String::from("a group has a name: group=NAME")),
            Some(name) => group = Some(name.to_owned()),
            None => fields.push(part),
        }
    }
    Ok(LimitWords { fields: fields.join(","), group })
}

impl LimitWords {
    /// What several of them say together: the limits, if there are any, and the group.
    ///
    /// Errors: as [`Limits::changed`]; two groups.
    pub(crate) fn together(all: &[LimitWords]) -> Result<(Option<Limits>, Option<&str>), String> {
        let mut groups = all.iter().filter_map(|words| words.group.as_deref());
        let group = groups.next();
        if let Some(other) = groups.find(|other| Some(*other) != group) {
            return Err(format!("a disk is in one group: not in '{other}', too"));
        }
        let fields: Vec<&str> = all.iter().map(|words| words.fields.as_str()).collect();
        let text = fields.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(",");
        if text.is_empty() {
            return Ok((None, group));
        }
        let limits = text.parse::<Limits>().map_err(|why| why.to_string())?;
        Ok((Some(limits), group))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &[&str]) -> Result<(String, Option<String>), String> {
        let words = words.iter().map(|text| parse_limits(text));
        let words = words.collect::<Result<Vec<_>, _>>()?;
        let (limits, group) = LimitWords::together(&words)?;
        let limits = limits.map_or_else(String::new, |limits| limits.to_string());
        Ok((limits, group.map(str::to_owned)))
    }

    #[test]
    fn several_words_say_one_thing() {
        let ok =
            |limits: &str, group: Option<&str>| Ok((limits.to_owned(), group.map(str::to_owned)));
        assert_eq!(read(&["iops-max=9", "group=a,iops=5"]), ok("iops=5,iops-max=9", Some("a")));
        assert_eq!(read(&["group=a"]), ok("", Some("a")));
        assert_eq!(read(&["group=a", "iops=0"]), ok("none", Some("a")));
        assert!(read(&["group="]).is_err());
        assert!(read(&["group=a", "group=b"]).is_err());
        assert!(read(&["iops=x"]).is_err());
        assert!(read(&["iops-max=9"]).is_err());
    }
}
