//! What refers to an image, like its conversion to overlaybd layers.
//!
//! Source: distribution-spec 1.1, "Listing Referrers". Registries without that API keep an index under a tag made of
//! the subject's digest, which clients maintain.

use super::{
    Error,
    documents::{Document, Fetched},
    exchange::Question,
    manifest::MAX_MANIFEST,
};
use oci_spec::image::{Descriptor, ImageIndex};
use url::{Url, form_urlencoded};

pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// More pages than any honest image has.
pub(crate) const MAX_PAGES: usize = 16;
pub(crate) const MAX_FOUND: usize = 1024;

/// Asks for a page. `query` is that of the page before's link.
pub(crate) fn page(
    repository: &str,
    subject: &str,
    artifact: Option<&str>,
    query: Option<String>,
) -> Document {
    let first = || {
        artifact.map(|kind| {
            form_urlencoded::Serializer::new(String::new()).append_pair("artifactType", kind).finish()
        })
    };
    Document {
        question: Question {
            repository: repository.to_owned(),
            path: format!("referrers/{subject}"),
            query: query.or_else(first),
            accept: INDEX,
            span: None,
            what: format!("the referrers of {subject}"),
        },
        limit: MAX_MANIFEST,
        digest: None,
    }
}

/// Asks for the index under the tag that stands in for the API.
pub(crate) fn tagged(repository: &str, subject: &str) -> Document {
    Document {
        question: Question {
            repository: repository.to_owned(),
            path: format!("manifests/{}", subject.replace(':', "-")),
            query: None,
            accept: INDEX,
            span: None,
            what: format!("the referrers of {subject} by their tag"),
        },
        limit: MAX_MANIFEST,
        digest: None,
    }
}

/// The entries of an answer; `None` when it is something else than an index of referrers.
pub(crate) fn read(fetched: &Fetched) -> Option<Vec<Descriptor>> {
    let fits = fetched.media_type == INDEX || fetched.media_type == "application/json";
    let index = ImageIndex::from_reader(&fetched.bytes[..]).ok().filter(|_| fits)?;
    Some(index.manifests().clone())
}

/// Whether a registry that answers so may lack the API.
pub(crate) fn is_lacking(error: &Error) -> bool {
    matches!(error, Error::NotFound { .. } | Error::Protocol { .. })
        || matches!(error, Error::Unavailable { status: 501, .. })
}

/// The query of the next page's link (RFC 8288): only that counts, so that a link can't lead elsewhere.
pub(crate) fn next(link: &str) -> Option<String> {
    link.split(',').find_map(|one| {
        let (target, parameters) = one.trim().strip_prefix('<')?.split_once('>')?;
        let is_next = parameters.split(';').any(|p| {
            p.trim().split_once('=').is_some_and(|(name, value)| {
                name.trim().eq_ignore_ascii_case("rel") && value.trim().trim_matches('"') == "next"
            })
        });
        let base = Url::parse("https://registry.invalid/").ok()?;
        base.join(target).ok().filter(|_| is_next)?.query().map(str::to_owned)
    })
}

/// Whether it is of that kind; those that say nothing are looked at.
pub(crate) fn is_of(descriptor: &Descriptor, artifact: Option<&str>) -> bool {
    let kind = descriptor.artifact_type().as_ref().map(ToString::to_string);
    artifact.is_none_or(|wanted| kind.as_deref() == Some(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_query_of_a_link_to_the_next_page_counts() {
        assert_eq!(next(r#"</v2/x/referrers/d?n=1&last=a>; rel="next""#).as_deref(), Some("n=1&last=a"));
        assert_eq!(next(r#"<https://evil.example/y?token=1>; rel=next"#).as_deref(), Some("token=1"));
        assert_eq!(next(r#"</a?b>; rel="prev", </c?d>; title="x"; rel="next""#).as_deref(), Some("d"));
        assert_eq!((next("</x>; rel=next"), next("nonsense"), next("</a?b>")), (None, None, None));
    }
}
